"""Step times of a GPU, compared with the least time that its memory and its matrix units allow."""

"""What a GPU's steps take, beside the least that its memory and its matrix units allow."""

"""What quantized weights cost and bring: memory, speed, and how well the model still predicts."""

"""`tandem bench five`: what each of five techniques brings, alone and with each other."""

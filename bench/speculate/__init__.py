"""What speculation brings and costs: method, K, concurrency and temperature, against none in the same run."""

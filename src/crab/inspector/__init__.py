"""What did a turn really change? Evidence from the kernel, its net effect, and the decision what to capture."""

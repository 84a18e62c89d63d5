"""One system a file: what to send, the exchange, and what is kept back."""

"""What a training program needs around its step."""

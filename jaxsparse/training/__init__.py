"""The parts of a training program around its step."""

"""`orch doctor`: what is there at a place, what is missing, and what to do about it."""

"""Ways to a place: connections, containers as wrappers round them, and what is said over them."""

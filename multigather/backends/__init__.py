"""Ways to run a gather. A backend knows `base` and its own kernel, never another backend."""

"""Gathers inside other people's programs: one module per library, imported by its users only."""

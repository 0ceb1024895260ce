"""Measured winners, one JSON file per GPU model, installed as ``multigather.tuning_cache``."""

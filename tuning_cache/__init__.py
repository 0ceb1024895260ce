"""Which backend and config runs which gather, as JSON; installed as multigather.tuning_cache."""

"""Measures speed and acceptance; changes nothing."""

"""Measurements of moepool, from the cases that the tests use. See README.md."""

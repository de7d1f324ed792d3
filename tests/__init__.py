"""Tests of moepool, run from the repository root."""

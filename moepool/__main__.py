"""`python -m moepool` is the command `moepool`."""

from moepool.cli import main

main(prog_name="moepool")

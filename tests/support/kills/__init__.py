"""Fleets of processes behind wires that lose a message when somebody is killed."""

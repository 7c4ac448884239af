"""This folder wires the store under a node and the threads beside it: tiers, shared media, upkeep,
the journal, digests of weight files. Wiring and files; decides nothing."""

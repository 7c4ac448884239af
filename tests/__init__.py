"""The tests, by package of the source; `support` holds what several of them use."""

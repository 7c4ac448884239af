"""The store's tests: servers, crashes, damaged records and what decoders are fed."""

//! Device printf: formatting of `vprintf`'s packed argument buffer.

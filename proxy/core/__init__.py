"""The pure core: values in, values out; `now` is an argument. No clock, I/O, randomness or logging."""

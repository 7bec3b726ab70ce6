"""The live page: what this process saw of the newest requests and since midnight. One file, no outside assets."""

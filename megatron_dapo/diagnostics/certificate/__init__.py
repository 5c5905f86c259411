"""The exactness certificate: one mini-batch on many layouts, its loss and every parameter's gradient against one
process in float32 (law 1)."""

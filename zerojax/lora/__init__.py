"""Low-rank adapters (LoRA) and quantized frozen weights (QLoRA).

`settings` holds what a user chooses. `targets` finds the modules that get adapters, and `adapters` the weights. `linen` and `nnx_modules`
run them in models that know nothing of it; `families` does so for the model families.
There is no mesh and no sharding here: an adapter is a weight like others.
A further form of adapter is a field in `settings` and a branch where `linen` and `nnx_modules` add the adapter's output.
"""

"""An engine that answers many requests at once.

`engine.Engine` holds a cache with a slot for each request, and decides after each token who reads a prompt and who gets a token. `programs`
are the compiled ones that it runs, `weights` the weights as they read them, `requests` what is asked and answered.
The cache itself is that of `models.decoding`; `trainer.serving` counts its bytes.
To pick tokens in another way, extend `draws`. To store weights in another way, extend `ops.quantized` and `weights`.
"""

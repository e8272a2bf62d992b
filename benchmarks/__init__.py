"""Benchmarks: what a layer costs, against roofs and baselines measured in the same run.

    python -m benchmarks.run        measure, print the table, write a result file      (run.py)
    python -m benchmarks.train      forward and backward pass                           (train.py)
    python -m benchmarks.tune       find the kernels' fastest configurations            (tune.py, search.py)
    python -m benchmarks.fit        how far predicted times are off                     (fit.py)
    python -m benchmarks.gpu_check  correctness, stress and a short table, for authors  (gpu_check.py)
    python -m benchmarks.tables     write README's table from the result files          (tables.py)

How to read the figures:

* **time_us** is the time of one layer, from tokens (T, D) and router logits (T, E) to the output, in a jitted
  step of several layers with different weights and routings, so that caches are as cold as when a model is
  served. `benchmarks.timing` says exactly what is timed; a result file repeats it under ``conditions``.
* **spread** is (p90 - p10) / median over the rounds. Differences within the spread mean nothing; a spread of
  more than a few percent means that the machine was busy with something else.
* **quant** none: weights in the activations' dtype. *fp8_tensor*: e4m3 weights, a scale a matrix, activations
  rounded by scales that are stored with the weights, as the rivals' rows of that name were measured (not the
  library's "fp8_tensor", which makes activations' scales in the call). *fp8_channel*, *fp8_block*: the
  library's. Tokens come in bfloat16; rounding them, and h, is part of the layer and of its time.
* **floor_us** is what the measured roofs allow: max(bytes that must move / read bandwidth, FLOPs / rate of a
  large matrix product). Bytes are those of the experts that the routing really hits, 1 a weight in FP8, where
  the matrix product is one of e4m3 numbers, measured in the same run. **x floor** = time over
  floor; nothing honest is under 1 by more than the roofs' own spread.
* **TFLOP/s** and **GB/s** count the FLOPs and bytes of the floor, not what a backend does on top of them.
* **bound_batched** and **bound_one_group** are the same two products as dense XLA matmuls, without routing,
  dispatch and combine: what a perfect dispatch would leave. They are no layers and win nothing.
* **elsewhere** and README's † come from rivals.json: other programs on another H200. They orient; they were
  not run beside ours.
* **red** rows were wrong against the float64 truth; nothing was timed for them. **skipped** rows say why; a
  skip that says *predicted* was not tried.
* On a CPU the harness runs, and its times mean nothing.

Results are kept as ``results/<device>/<name>.json``; two of them are compared with ``--compare A B``, which
gives geometric means for decode (T ≤ 64), middle (to 1024) and prefill.
"""

"""Triton kernels and their launchers. Operators check arguments and import these; no kernel imports an operator.

Rules, because a row's bits must not depend on what stands beside it:

    ids       program ids and rows widen to int64 before they are multiplied by a pitch
    loads     whatever can overrun is masked; a masked value is zero, and zero changes no sum
    sums      float32 whatever the storage, over a tile of constant size, in one order; one rounding at the end
    fusion    `enable_fp_fusion=False`; what is one instruction says so (`tl.fma`)
    variants  sizes of the model are constexprs and counts are not, nor specialised on: one binary for any pass

Names: i_ index (of a row, head, segment, position, chunk), o_ offset inside a block, p_ pointer, b_ block in registers,
m_ mask; capitals are constexprs; what is left are arguments and single words of the tables.
"""

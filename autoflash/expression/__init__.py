"""The language of score_mod and mask_mod: parsed with an allow-list, differentiated, printed as text.

An expression is one Python expression over ``score``, ``b``, ``h``, ``q_idx``, ``kv_idx`` (a mask_mod has no ``score``)
and named parameters: numbers, as ``cap``, and elements of tensors, as ``table[h, q_idx - kv_idx + n]``. It has

- floats, which are float32 in kernels; integers of 32 bits, which wrap around; truths, which are no numbers;
- ``+ - * / // % **``, where ``/`` always gives a float, ``//`` and ``%`` take integers and round down as Python does
  (x // 0 is 0, x % 0 is x), and an exponent is a whole number in the text;
- ``< <= > >= == !=``, also in chains; ``and or not``, or ``& | ~``; ``x if condition else y``;
- ``where(condition, x, y)``, ``minimum``, ``maximum``, ``abs``, ``exp``, ``log``, ``sqrt``, ``tanh``, ``sigmoid``,
  ``sin``, ``cos``; ``floor``, which gives an integer; ``float``, which integers beside floats need not be told;
  and ``inf``.

An element outside a tensor, also at a negative index, is 0. A condition has no part in a derivative, nor has the value
that it does not choose.
"""

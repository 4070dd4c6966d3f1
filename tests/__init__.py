"""The tests of `src/onepass/x/y.py` are `tests/x/test_y.py` or `tests/x/test_y_<aspect>.py`."""

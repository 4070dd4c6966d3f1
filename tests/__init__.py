"""The tests mirror the repository: those of `src/onepass/x/y.py` are `x/test_y.py` or `x/test_y_<aspect>.py`."""

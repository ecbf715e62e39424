"""The code behind `taskd.api`, `taskd.python` and `mindx_elastic`, which only re-export it."""

"""Translation: bytes on the wire <-> the values of `taskd.model`."""

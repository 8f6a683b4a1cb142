"""The law: what hdnn promises. A change of the code may change the imports here, and no more."""

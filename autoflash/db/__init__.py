"""The tuning database, behind one door: ``repository``."""

"""Who holds memory now: devices and processes (:mod:`command`), and how a profiled process tells (:mod:`publish`)."""

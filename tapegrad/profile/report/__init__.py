"""``tapegrad report``: a recorded run as text (:mod:`rows`, :mod:`text`) and as files (:mod:`outputs`)."""

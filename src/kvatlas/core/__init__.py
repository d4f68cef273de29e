"""The terms of kvatlas as frozen data, shared by every room; it imports nothing of ours."""

from kvatlas.core.basics import *
from kvatlas.core.maps import *
from kvatlas.core.settings import *
from kvatlas.core.traces import *

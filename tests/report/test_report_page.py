from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from conftest import CONFIG, FLOPS_PER_STEP, N_STEPS, frozen_row, write_run

from scalerl.curve import fit
from scalerl.errors import InputError, WriteError
from scalerl.record import RunRecord, RunWriter
from scalerl.report import report_html, write_report

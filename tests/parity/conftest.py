import os
import sys
from pathlib import Path

# Peers are built at random from their configuration classes; nothing may be fetched.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

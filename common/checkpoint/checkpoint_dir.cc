#include "common/checkpoint/checkpoint_dir.h"

#include "common/checkpoint/manifest.h"

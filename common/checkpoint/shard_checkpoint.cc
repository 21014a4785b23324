#include "common/checkpoint/shard_checkpoint.h"

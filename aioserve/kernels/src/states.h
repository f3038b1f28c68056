// The kernels of layers that keep a state between tokens. Numbers of states and sums are float32. Each
// row and head is one thread's, in one order: a row's result depends neither on others nor on threads.
#pragma once
#include "causal_conv.h"
#include "gated_delta.h"
#include "gated_norm.h"
#include "selective_scan.h"
#include "state_space.h"

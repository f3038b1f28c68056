// The shapes of AMX's tiles, which a thread sets before it uses them. Knows no numbers.
#pragma once
#include <stdint.h>

// gcc's own instructions on tiles do not say that they read memory.
#define IS_WRITTEN(p) __asm__ volatile("" ::"r"(p) : "memory")

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

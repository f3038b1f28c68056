// What all users of AMX tiles need: how they are set up. Knows no layouts.
#pragma once
#include <immintrin.h>
#include <stdint.h>

// gcc's own instructions on tiles do not say that they read memory.
#define IS_WRITTEN(p) __asm__ volatile("" ::"r"(p) : "memory")

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

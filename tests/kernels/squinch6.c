/* Squinch written from docs/format.md alone: proof that the page is enough. Built by test_format_in_c.py; no tuning. */
#include <math.h>
#include <stdint.h>
#include <string.h>

static float M[256], R[256], D[256];

static void make_tables(void) {
    for (int q = 1; q <= 254; q++) {
        M[q] = (float)exp((q - 128) / 6.0);
        R[q] = 225.0f / M[q];
        D[q] = M[q] / 225.0f;
    }
}

static void philox(uint64_t counter, uint64_t seed, uint32_t w[4]) {
    uint32_t c[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), 0, 0}, k[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t first = (uint64_t)c[0] * 0xD2511F53u, second = (uint64_t)c[2] * 0xCD9E8D57u;
        uint32_t next[4] = {(uint32_t)(second >> 32) ^ c[1] ^ k[0], (uint32_t)second,
                            (uint32_t)(first >> 32) ^ c[3] ^ k[1], (uint32_t)first};
        memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    memcpy(w, c, sizeof c);
}

static int code_of(float u, int stochastic, uint32_t h) {
    int k = 0;
    if (!stochastic) {
        while (k < 15 && (float)(k * k + k) + 0.375f <= u) k++;
        return k;
    }
    while (k < 15 && (float)((k + 1) * (k + 1)) <= u) k++;
    float chance = ((float)h + 0.5f) / 65536.0f;
    return chance * (float)(2 * k + 1) < u - (float)(k * k) && k < 15 ? k + 1 : k;
}

static float value_at(const float *x, int64_t n, int64_t i, int e) {
    float value = i < n ? x[i] : 0.0f;
    return e ? (float)((double)value * ldexp(1.0, -e)) : value;
}

static float block_max(const float *x, int64_t n, int64_t tile, int j, int e, int *finite) {
    float max = 0.0f;
    *finite = 1;
    for (int b = 0; b < 8; b++) {
        float value = value_at(x, n, 512 * tile + 64 * b + j, e);
        if (!isfinite(value)) *finite = 0;
        if (fabsf(value) > max) max = fabsf(value);
    }
    return max;
}

void squinch6_encode(const float *x, int64_t n, uint8_t *out, int stochastic, uint64_t seed) {
    make_tables();
    int64_t tiles = (n + 511) / 512;
    int finite, e = 0;
    float m = 0.0f;
    for (int64_t t = 0; t < tiles; t++)
        for (int j = 0; j < 64; j++) {
            float max = block_max(x, n, t, j, 0, &finite);
            if (finite && max > m) m = max;
        }
    if (m > 0.0f && (m < ldexpf(1.0f, -16) || m > ldexpf(1.0f, 28))) e = ilogbf(m);
    for (int64_t t = 0; t < tiles; t++)
        for (int j = 0; j < 64; j++) {
            float max = block_max(x, n, t, j, e, &finite);
            int q = 0;
            if (!finite) q = 255;
            else if (max > 0.0f) for (q = 1; max > M[q]; q++) {}
            uint8_t *tile = out + 384 * t;
            uint32_t w[4], word = 0, signs = 0;
            philox((uint64_t)(64 * t + j), seed, w);
            for (int b = 0; b < 8; b++) {
                float value = value_at(x, n, 512 * t + 64 * b + j, e);
                uint32_t code;
                if (q == 255) code = isnan(value) ? 15 : isinf(value) ? 14 : 0;
                else code = (uint32_t)code_of(fabsf(value) * R[q], stochastic, (w[b / 2] >> (16 * (b % 2))) & 0xffff);
                word |= code << (4 * b);
                signs |= (uint32_t)(signbit(value) != 0) << b;
            }
            tile[j] = (uint8_t)q;
            tile[64 + j] = (uint8_t)signs;
            memcpy(tile + 128 + 4 * j, &word, 4);
        }
    int32_t trailer[2] = {e, 0};
    memcpy(out + 384 * tiles, trailer, 8);
}

void squinch6_decode(const uint8_t *encoded, int64_t n, float *out) {
    make_tables();
    int32_t e;
    memcpy(&e, encoded + 384 * ((n + 511) / 512), 4);
    for (int64_t i = 0; i < n; i++) {
        const uint8_t *tile = encoded + 384 * (i / 512);
        int j = (int)(i % 64), b = (int)(i % 512 / 64);
        uint32_t word;
        memcpy(&word, tile + 128 + 4 * j, 4);
        int k = (word >> (4 * b)) & 15, q = tile[j];
        float v = (float)(k * k) * D[q];
        if (q == 255) v = k == 15 ? NAN : k == 14 ? INFINITY : 0.0f;
        if (e && isfinite(v)) {
            v = (float)((double)v * ldexp(1.0, e));
            if (isinf(v)) v = 3.4028234663852886e38f;
        }
        out[i] = (tile[64 + j] >> b) & 1 ? -v : v;
    }
}

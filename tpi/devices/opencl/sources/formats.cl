// Quantised formats in the tiled layout: squares of 8 outputs x 32 inputs, the planes of codes interleaved by words (word
// 0 of output 0..7, word 1 of output 0..7, ...), then the factors, two bytes of each output after another. See
// tpi/pack/groups.py. LOW and HIGH are the bits of a code in each plane, FACTOR_BYTES is of one group.
#if defined(Q8)
#define LOW 8
#define HIGH 0
#elif defined(Q6)
#define LOW 4
#define HIGH 2
#elif defined(Q5)
#define LOW 4
#define HIGH 1
#elif defined(Q3) || defined(IQ2) || defined(IQ1)
#define LOW 2
#define HIGH 1
#elif defined(Q2)
#define LOW 2
#define HIGH 0
#else
#define LOW 4
#define HIGH 0
#endif

#if defined(Q6) || defined(Q3) || defined(IQ2) || defined(IQ1) || defined(NVFP4)
#define HALVES  // a scale for each half of a group
#define FACTOR_BYTES 4
#elif defined(Q2)
#define HALVES
#define MINIMA  // and a minimum
#define FACTOR_BYTES 6
#elif defined(Q4) || defined(Q5)
#define FACTOR_BYTES 4
#elif defined(MXFP4)
#define FACTOR_BYTES 1
#else
#define FACTOR_BYTES 2
#endif

#if defined(MXFP4) || defined(NVFP4)
#define TABLE 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12  // doubled
#elif defined(IQ4)
#define TABLE -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
#elif defined(IQ3S)
#define TABLE -15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15
#elif defined(IQ3)
#define TABLE -62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62
#elif defined(IQ2)
#define TABLE -43, -25, -8, 8, 25, 43, 0, 0
#elif defined(IQ1)
#define TABLE -9, -7, -1, 1, 7, 9, 0, 0
#endif

#if defined(Q6)
#define OFFSET 32
#elif defined(Q3)
#define OFFSET 4
#else
#define OFFSET 0
#endif

#if defined(IQ2) || defined(IQ1)
#define UNIT 0.125f
#elif defined(NVFP4)
#define UNIT 0.0078125f
#else
#define UNIT 1.0f
#endif

#define SQUARE (8 * (4 * (LOW + HIGH) + FACTOR_BYTES))  // bytes

#if defined(TABLE)
constant char numbers[] = {TABLE};
#define LOOK(code) numbers[code]
#else
#define LOOK(code) ((code) - OFFSET)
#endif

static inline Bytes factors_at(Bytes square) { return square + 32 * (LOW + HIGH); }

// Return the scale of an output, of the first or the second half of its group where each has its own.
static inline float scale_of(Bytes square, int output, int second) {
    Bytes factors = factors_at(square);
#if defined(MXFP4)
    return as_float(max((int)factors[output] - 1, 1) << 23);  // half of the power, as numbers are doubled
#elif defined(MINIMA)
    return half_at(factors, output) * (factors[32 + 2 * output] >> 4 * second & 15);
#elif defined(HALVES)
    return half_at(factors, output) * UNIT * (char)factors[16 + 2 * output + second];
#else
    return half_at(factors, output);
#endif
}

// Return what is added for each unit of the sum of the activations' codes: the minimum, or the offset of the codes.
static inline float minimum_of(Bytes square, int output, int second) {
#if defined(Q4) || defined(Q5)
    return half_at(factors_at(square), 8 + output);
#elif defined(Q4S)
    return -8.0f * scale_of(square, output, second);
#elif defined(MINIMA)
    return -half_at(factors_at(square), 8 + output) * (factors_at(square)[33 + 2 * output] >> 4 * second & 15);
#else
    return 0.0f;
#endif
}

#if LOW != 8
// Return the bits of words 0 to 3 of a plane that lies `at` words into the codes, or of words 4 to 7 if `second`.
static inline int4 plane_of(global const int *words, int at, int bits, int second) {
    global const int *plane = words + 8 * at;
    int mask = ((1 << bits) - 1) * 0x01010101;
    if (bits == 4) return (int4)(plane[0], plane[8], plane[16], plane[24]) >> (4 * second) & mask;
    if (bits == 2) return (int4)(plane[0], plane[8], plane[0] >> 2, plane[8] >> 2) >> (4 * second) & mask;
    return (int4)(plane[0], plane[0] >> 1, plane[0] >> 2, plane[0] >> 3) >> (4 * second) & mask;
}

static inline int4 half_of(global const int *words, int second) {
    int4 codes = plane_of(words, 0, LOW, second);
    if (HIGH) codes |= plane_of(words, LOW, HIGH, second) << LOW;
#if defined(TABLE)
    uchar16 each = as_uchar16(codes);
    return as_int4((char16)(LOOK(each.s0), LOOK(each.s1), LOOK(each.s2), LOOK(each.s3), LOOK(each.s4), LOOK(each.s5),
                            LOOK(each.s6), LOOK(each.s7), LOOK(each.s8), LOOK(each.s9), LOOK(each.sa), LOOK(each.sb),
                            LOOK(each.sc), LOOK(each.sd), LOOK(each.se), LOOK(each.sf)));
#else
    return OFFSET ? as_int4(as_char16(codes) - (char16)(OFFSET)) : codes;
#endif
}
#endif

// Load the 32 numbers of an output, 16 in each of `first` and `second`, as int8.
static inline void codes_of(Bytes square, int output, int4 *first, int4 *second) {
    global const int *words = (global const int *)square + output;
#if LOW == 8
    *first = (int4)(words[0], words[8], words[16], words[24]);
    *second = (int4)(words[32], words[40], words[48], words[56]);
#else
    *first = half_of(words, 0);
    *second = half_of(words, 1);
#endif
}

// Return the bits of one code in a plane.
static inline int code_at(Bytes plane, int bits, int output, int value) {
    int word = value / 4;
    return plane[word % bits * 32 + 4 * output + value % 4] >> (word / bits * bits) & ((1 << bits) - 1);
}

// Return one weight of a square.
static inline float weight_of(Bytes square, int output, int value) {
    int code = code_at(square, LOW, output, value);
#if defined(Q8)
    return scale_of(square, output, 0) * (char)code;
#else
#if HIGH
    code |= code_at(square + 32 * LOW, HIGH, output, value) << LOW;
#endif
    return scale_of(square, output, value / 16) * LOOK(code) + minimum_of(square, output, value / 16);
#endif
}

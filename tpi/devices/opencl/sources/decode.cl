// Weights as floats, one work-group per vector: for rows of an embedding, and for inspecting stored weights.

// Return a value, given the byte of its code (4 bits: in the low or high half), its scale, and its stored minimum.
static inline float decoded(Bytes codes, int byte, int high, float scale, Bytes minimum) {
#if defined(Q8)
    return scale * ((global const char *)codes)[byte];
#else
    int code = high ? codes[byte] >> 4 : codes[byte] & 15;
#if defined(Q4)
    return scale * code + half_at(minimum, 0);
#else
    return scale * (code - 8);
#endif
#endif
}

#if defined(Q8)
#define CODES 32
#define GROUP_BYTES 34
#elif defined(Q4)
#define CODES 16
#define GROUP_BYTES 20
#elif defined(Q4S)
#define CODES 16
#define GROUP_BYTES 18
#endif

#if defined(F32) || defined(BF16) || defined(F16) || defined(GROUP_BYTES)  // others are tiled alone
// Decode vectors of the record layout, `count` values each, one every `stride` bytes.
KERNEL decode_records(Bytes data, ulong offset, ulong stride, int count, global const int *listed,
                      global float *out) {
    int index = get_group_id(0);
    Bytes vector = data + offset + (listed ? listed[index] : index) * stride;
    for (int at = get_local_id(0); at < count; at += LANES) {
#if defined(F32)
        float value = ((Floats)vector)[at];
#elif defined(BF16)
        float value = as_float((uint)((global const ushort *)vector)[at] << 16);
#elif defined(F16)
        float value = half_at(vector, at);
#else
        Bytes group = vector + at / GROUP * GROUP_BYTES;
        int within = at % GROUP;
        float scale = half_at(group, 0);
        float value = decoded(group + GROUP_BYTES - CODES, within % CODES, within >= CODES, scale, group + 2);
#endif
        out[(ulong)index * count + at] = value;
    }
}
#endif

#if !defined(F32) && !defined(BF16) && !defined(F16)
// Decode vectors of the tiled layout. A value's output and input are its vector and its index; for columns, its index
// and its vector. A unit has `width` vectors.
KERNEL decode_tiles(Bytes data, ulong offset, ulong unit_bytes, int width, int columns, int count,
                    global const int *listed, global float *out) {
    int index = get_group_id(0), vector = listed ? listed[index] : index, inside = vector % width;
    for (int at = get_local_id(0); at < count; at += LANES) {
        int output = columns ? at : inside, input = columns ? inside : at, inputs = columns ? width : count;
        ulong number = (ulong)(output / 8) * (inputs / GROUP) + input / GROUP;
        Bytes square = data + offset + vector / width * unit_bytes + number * SQUARE;
        out[(ulong)index * count + at] = weight_of(square, output % 8, input % GROUP);
    }
}
#endif

#include <algorithm>

#include "plans.hpp"

namespace tpi {

LatentPlan::LatentPlan(nb::tuple fields, size_t rank)
    : run(field<nb::tuple>(fields, 0)),
      norm(field<nb::tuple>(fields, 1), rank),
      rope(field<size_t>(fields, 2)),
      width(field<size_t>(fields, 3)),
      bias(keep_vector(fields[4], "the latent vector's bias", rank + rope)) {
    if (run.units() && run.vectors() < rank + rope) throw KernelError("the latent run holds too few vectors");
}

Latent LatentPlan::view(const uint8_t* data) const {
    return {run.matrix("latent", data), norm.view(), or_null(bias), norm.weight.size(), rope, width};
}

QueryLatentPlan::QueryLatentPlan(nb::tuple fields)
    : run(field<nb::tuple>(fields, 0)),
      up(field<nb::tuple>(fields, 1)),
      norm(field<nb::tuple>(fields, 2), up.hidden()),
      bias(keep_vector(fields[3], "the bias of the queries' latent vector", up.hidden())) {
    if (run.units() && run.vectors() < up.hidden()) throw KernelError("the queries' latent run holds too few vectors");
}

QueryLatent QueryLatentPlan::view(const uint8_t* data) const {
    return {run.matrix("q_latent", data), norm.view(), or_null(bias), norm.weight.size()};
}

AttentionPlan::AttentionPlan(nb::tuple query, nb::tuple kv, nb::tuple norm, nb::tuple shape, nb::object kv_index,
                             nb::tuple vectors, nb::tuple numbers, nb::object latent,
                             nb::object query_latent)
    : query_(query),
      kv_(kv),
      norm_(norm, query_.hidden()),
      heads_(field<size_t>(shape, 0)),
      kv_heads_(field<size_t>(shape, 1)),
      head_dim_(field<size_t>(shape, 2)),
      q_bias_(keep_vector(vectors[0], "q_bias", heads_ * head_dim_)),
      k_bias_(keep_vector(vectors[1], "k_bias", kv_heads_ * head_dim_)),
      v_bias_(keep_vector(vectors[2], "v_bias", kv_heads_ * head_dim_)),
      q_norm_(keep_vector(vectors[3], "q_norm", head_dim_ * (field<bool>(numbers, 5) ? heads_ : 1))),
      k_norm_(keep_vector(vectors[4], "k_norm", head_dim_ * (field<bool>(numbers, 5) ? kv_heads_ : 1))),
      rope_scale_(field<float>(numbers, 0)),
      scale_(field<float>(numbers, 1)),
      softcap_(field<float>(numbers, 2)),
      window_(field<size_t>(numbers, 3)),
      clip_(field<float>(numbers, 4)),
      whole_norms_(field<bool>(numbers, 5)),
      growth_(field<float>(numbers, 6)),
      growth_tokens_(field<int32_t>(numbers, 7)),
      late_norms_(field<bool>(numbers, 8)),
      shared_(field<bool>(numbers, 9)) {
    if (growth_ != 0 && growth_tokens_ < 1) throw KernelError("growth_tokens must be positive");
    Array index(kv_index, "kv_index", "i", {length(heads_)});
    check_indices(index, "KV head", kv_heads_);
    kv_index_.assign(index.as<int32_t>(), index.as<int32_t>() + heads_);
    Array frequencies(vectors[5], "inv_freq", "f", {kAny});
    inv_freq_.assign(frequencies.as<float>(), frequencies.as<float>() + frequencies.total());
    sinks_ = keep_vector(vectors[6], "sinks", heads_);
    v_norm_ = keep_vector(vectors[7], "v_norm", head_dim_);
    if (whole_norms_ && !v_norm_.empty()) throw KernelError("norms of all heads cannot be combined with v_norm");
    if (whole_norms_ && late_norms_) throw KernelError("norms of all heads come before RoPE");
    if (2 * inv_freq_.size() > head_dim_) throw KernelError("inv_freq is longer than half a head");
    if (!latent.is_none()) latent_.emplace(nb::cast<nb::tuple>(latent), kv_.hidden());
    if (!query_latent.is_none()) query_latent_.emplace(nb::cast<nb::tuple>(query_latent));
    check_latent();
    if (query_.vectors() < heads_ * head_dim_ || q_run().vectors() != query_.vectors() ||
        (!shared_ && kv_.vectors() < kv_heads_ * kv_width()))
        throw KernelError("the runs hold fewer vectors than the heads need");
    AttentionCall all = call(nullptr);  // throws unless all parts are there
    if (shared_ && (latent_ || whole_norms_ || kv_.units()))
        throw KernelError("heads that read the keys of another layer have none of their own");
    if (gated() && latent_) throw KernelError("an output gate cannot be combined with a latent vector");
    const Matrix& of_input = query_latent_ ? all.query_latent.matrix : all.q;
    forms_ = latent_ ? RowForms{&of_input, &all.latent.matrix} : RowForms{&all.q, &all.k, &all.v};
    if (gated()) forms_ = forms_ | RowForms{&all.gate};
}

void AttentionPlan::check_latent() const {
    size_t inputs = latent_ ? latent_->run.hidden() : kv_.hidden();
    if (inputs != query_.hidden()) throw KernelError("the query and KV runs differ in hidden size");
    if (query_latent_ && (!latent_ || query_latent_->run.hidden() != inputs || !q_bias_.empty() || !q_norm_.empty()))
        throw KernelError("queries from a latent vector need keys from one too, and have neither biases nor norms");
    if (!latent_) return;
    if (heads_ && query_latent_ && !query_latent_->run.units())
        throw KernelError("heads need all of the queries' latent run");
    if (heads_ && !latent_->run.units()) throw KernelError("heads need all of the latent run");
    if (latent_->rope != 2 * inv_freq_.size() || latent_->rope >= head_dim_ || latent_->width > head_dim_ ||
        latent_->rope + latent_->width < head_dim_)
        throw KernelError("the values and the width of the latent vector do not fit the heads");
    if (whole_norms_ || clip_ > 0 || !k_norm_.empty() || !v_norm_.empty() || !k_bias_.empty() || !v_bias_.empty())
        throw KernelError("keys and values from a latent vector have neither biases nor norms");
}

AttentionCall AttentionPlan::call(const uint8_t* data) const {
    AttentionCall call{};
    if (latent_) call.latent = latent_->view(data);
    const uint8_t* q_data = data;
    if (query_latent_) {
        const uint8_t* own = data ? data + latent_->run.bytes() : nullptr;
        call.query_latent = query_latent_->view(own);
        q_data = own ? own + query_latent_->run.bytes() : nullptr;
    }
    if (data) data += latent_bytes();
    const uint8_t* kv_data = data ? data + query_.bytes() : nullptr;
    call.q = q_run().matrix("q", query_latent_ ? q_data : data);
    call.o = query_.matrix("o", data);
    if (gated()) call.gate = query_.matrix("gate", data);
    call.k = kv_.matrix("k", kv_data);
    call.v = kv_.matrix("v", kv_data);
    call.norm = norm_.view();
    call.heads = heads_;
    call.kv_heads = kv_heads_;
    call.head_dim = head_dim_;
    call.hidden = query_.hidden();
    call.kv_index = kv_index_.data();
    call.q_bias = or_null(q_bias_);
    call.k_bias = or_null(k_bias_);
    call.v_bias = or_null(v_bias_);
    call.q_norm = or_null(q_norm_);
    call.k_norm = or_null(k_norm_);
    call.v_norm = or_null(v_norm_);
    call.inv_freq = inv_freq_.data();
    call.half_rotary = inv_freq_.size();
    call.rope_scale = rope_scale_;
    call.scale = scale_;
    call.softcap = softcap_;
    call.window = window_;
    call.clip = clip_;
    call.growth = growth_;
    call.growth_tokens = growth_tokens_;
    call.late_norms = late_norms_;
    call.sinks = or_null(sinks_);
    call.shared = shared_;
    call.whole_norms = whole_norms_;
    return call;
}

std::unique_ptr<Array> AttentionPlan::weights(nb::handle data) const {
    return keep_array(data, "the weights", "B", {length(latent_bytes() + query_.bytes() + kv_.bytes())});
}

namespace {

// The format of a cache, by the type of its elements.
KvFormat kv_format(char element) {
    switch (element) {
        case 'f': return KvFormat::f32;
        case 'e': return KvFormat::f16;
        case 'b': return KvFormat::q8;
        default: return KvFormat::q4;
    }
}

size_t element_bytes(KvFormat format) { return format == KvFormat::f32 ? 4 : format == KvFormat::f16 ? 2 : 1; }

}  // namespace

std::unique_ptr<Array> AttentionPlan::cache(nb::handle array, const char* name) const {
    auto found = keep_array(array, name, "febB", {kAny, length(kv_heads_), length(kPageTokens), kAny}, true);
    KvFormat format = kv_format(found->type());
    size_t width = found->size(3), expected = vector_bytes(format, head_dim_) / element_bytes(format);
    if (width != expected)
        throw KernelError(std::string(name) + " holds vectors of " + std::to_string(width) + " elements; expected " +
                          std::to_string(expected));
    return found;
}

Kv AttentionPlan::view(const Array& cache) const {
    KvFormat format = kv_format(cache.type());
    return {cache.as<uint8_t>(), format, cache.size(3) * element_bytes(format)};
}

BatchArrays::BatchArrays(nb::handle positions_, nb::handle sequence_, nb::handle tables_, size_t tokens)
    : positions(positions_, "positions", "i", {length(tokens)}),
      sequence(sequence_, "sequence", "i", {length(tokens)}),
      tables(tables_, "tables", "i", {kAny, kAny}) {}

ProjectedArrays::ProjectedArrays(nb::tuple arrays, Py_ssize_t tokens, Py_ssize_t heads, Py_ssize_t kv_heads,
                                 Py_ssize_t dim, bool gated, bool writable)
    : queries(arrays[0], "the queries", "f", {tokens, heads, dim}, writable),
      keys(arrays[1], "the keys", "f", {tokens, kv_heads, dim}, writable),
      values(arrays[2], "the values", "f", {tokens, kv_heads, dim}, writable) {
    if (gated) gate.emplace(arrays[3], "the gate", "f", Dims{tokens, heads * dim}, writable);
}

void AttentionPlan::check_batch(const BatchArrays& batch, const Array& keys, const Array& values) const {
    check_indices(batch.sequence, "sequence", batch.tables.size(0));
    check_indices(batch.positions, "position", batch.tables.size(1) * kPageTokens);
    const auto *table = batch.tables.as<int32_t>(), *positions = batch.positions.as<int32_t>();
    const auto* sequence = batch.sequence.as<int32_t>();
    size_t width = batch.tables.size(1), blocks = std::min(keys.size(0), values.size(0));
    for (size_t t = 0; t < batch.positions.total(); ++t) {
        auto position = static_cast<size_t>(positions[t]);
        const int32_t* row = table + static_cast<size_t>(sequence[t]) * width;
        size_t first = window_ && position + 1 > window_ ? position + 1 - window_ : 0;
        bool follows = t && sequence[t] == sequence[t - 1] && positions[t] == positions[t - 1] + 1;
        if (follows) first = position;  // the token before checked the other pages
        for (size_t b = first / kPageTokens; b <= position / kPageTokens; ++b)
            if (row[b] < 0 || static_cast<size_t>(row[b]) >= blocks)
                throw KernelError("page " + std::to_string(row[b]) + " is outside the " + std::to_string(blocks) +
                                  " of this node");
    }
}

AttentionCall AttentionPlan::call(const Array& weights, const Array& keys, const Array& values,
                                  const BatchArrays& batch, const float* x, float* out) const {
    AttentionCall call = this->call(weights.as<uint8_t>());
    place(call, keys, values, batch);
    call.x = x;
    call.out = out;
    return call;
}

void AttentionPlan::place(AttentionCall& call, const Array& keys, const Array& values, const BatchArrays& batch) const {
    call.tokens = batch.positions.total();
    call.keys = view(keys);
    call.values = view(values);
    call.positions = batch.positions.as<int32_t>();
    call.sequence = batch.sequence.as<int32_t>();
    call.tables = batch.tables.as<int32_t>();
    call.table_width = batch.tables.size(1);
}

void AttentionPlan::run(nb::handle data, nb::handle x, nb::handle keys, nb::handle values, nb::handle positions,
                        nb::handle sequence, nb::handle tables, nb::handle out) const {
    auto held = weights(data), key_array = cache(keys, "the key cache"), value_array = cache(values, "the value cache");
    BlockInput input(x, hidden(), forms_);
    BatchArrays batch(positions, sequence, tables, input.tokens());
    Array result(out, "out", "f", {length(input.tokens()), length(hidden())}, true);
    check_batch(batch, *key_array, *value_array);
    if (!heads_ || !result.total()) return zero(result);
    AttentionCall call = this->call(*held, *key_array, *value_array, batch, input.x(), result.as<float>());
    call.prepared = input.prepared();
    launch(kernels().attention, call);
}

// ---- in steps ----

void AttentionPlan::prepare(nb::handle x, bool normed, PreparedInput& into) const {
    run_prepare(normed ? Norm{} : norm_.view(), x, hidden(), forms_, into);
}

ProjectedArrays AttentionPlan::heads_of(nb::tuple projected, size_t tokens, bool writable) const {
    return {projected, length(tokens), length(heads_), length(kv_heads_), length(head_dim_), gated(), writable};
}

void AttentionPlan::project(nb::handle data, nb::handle x, nb::handle positions, nb::tuple projected) const {
    auto held = weights(data);
    BlockInput input(x, hidden(), forms_);
    Array at(positions, "positions", "i", {length(input.tokens())});
    ProjectedArrays heads = heads_of(projected, input.tokens(), true);
    if (!heads_ || !input.tokens()) return;
    AttentionCall call = this->call(held->as<uint8_t>());
    call.tokens = input.tokens();
    call.x = input.x();
    call.prepared = input.prepared();
    call.positions = at.as<int32_t>();
    call.projected = heads.view();
    launch(kernels().project, call);
}

void AttentionPlan::attend(nb::tuple projected, nb::handle keys, nb::handle values, nb::handle positions,
                           nb::handle sequence, nb::handle tables, nb::handle out) const {
    auto key_array = cache(keys, "the key cache"), value_array = cache(values, "the value cache");
    Array result(out, "out", "f", {kAny, length(heads_ * head_dim_)}, true);
    BatchArrays batch(positions, sequence, tables, result.size(0));
    ProjectedArrays heads = heads_of(projected, result.size(0), false);
    check_batch(batch, *key_array, *value_array);
    if (!result.total()) return;
    AttentionCall call = this->call(nullptr);
    place(call, *key_array, *value_array, batch);
    call.projected = heads.view();
    call.out = result.as<float>();
    launch(kernels().attend, call);
}

void AttentionPlan::output(nb::handle data, nb::handle mixed, nb::handle out) const {
    auto held = weights(data);
    Array input(mixed, "the heads", "f", {kAny, length(heads_ * head_dim_)});
    Array result(out, "out", "f", {length(input.size(0)), length(hidden())}, true);
    if (!heads_ || !result.total()) return zero(result);
    AttentionCall call = this->call(held->as<uint8_t>());
    call.tokens = input.size(0);
    call.x = input.as<float>();
    call.out = result.as<float>();
    launch(kernels().output, call);
}

}  // namespace tpi

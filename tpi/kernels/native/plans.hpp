// The Python objects: a plan per block or table. A plan is checked once when it is created, its calls each time.
#pragma once

#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "isa.hpp"
#include "prepared.hpp"

namespace tpi {

// A run of units as Python describes it: (tiled, units, width, hidden, [(name, format, axis), ...]).
class Run {
public:
    Run(nb::tuple fields);
    size_t bytes() const { return units_ * unit_bytes_; }
    size_t unit_bytes() const { return unit_bytes_; }
    size_t units() const { return units_; }
    size_t hidden() const { return hidden_; }
    size_t vectors() const { return units_ * width_; }
    bool tiled() const { return tiled_; }
    // Return the part called `name`, with its data at `data` (of the run's first unit). Throws if there is none.
    Matrix matrix(const std::string& name, const uint8_t* data) const;
    // The same for some of the units.
    Matrix matrix(const std::string& name, const uint8_t* data, size_t first, size_t units) const;
    size_t width() const { return width_; }
    bool is_column(const std::string& name) const;
    bool has(const std::string& name) const;
    const std::string& first_part() const { return parts_.front().name; }

private:
    struct Part {
        std::string name;
        Format format;
        bool column;
        size_t offset;
    };
    const Part& part(const std::string& name) const;
    void check(const Part& part) const;

    bool tiled_;
    size_t units_, width_, hidden_, unit_bytes_, record_bytes_;
    std::vector<Part> parts_;
};

// The norm of a block: (kind, eps, weight, bias or None); the weight is empty if there is no norm.
struct NormPlan {
    NormPlan(nb::tuple fields, size_t hidden);
    Norm view() const;

    bool rms;
    float eps;
    std::vector<float> weight, bias;
};

// The tokens of a step (tpi.kernels.spec.Batch); the attention plans check them.
struct BatchArrays {
    BatchArrays(nb::handle positions, nb::handle sequence, nb::handle tables, size_t tokens);

    Array positions, sequence, tables;
};

// Heads of the tokens of a step (tpi.kernels.spec.Projected).
struct ProjectedArrays {
    ProjectedArrays(nb::tuple arrays, Py_ssize_t tokens, Py_ssize_t heads, Py_ssize_t kv_heads, Py_ssize_t dim,
                    bool gated, bool writable);
    Projected view() const {
        return {queries.as<float>(), keys.as<float>(), values.as<float>(), gate ? gate->as<float>() : nullptr};
    }

    Array queries, keys, values;
    std::optional<Array> gate;
};

// The latent vector of keys and values: (run, norm, rope, width, bias or None). Its units come first in the weights.
struct LatentPlan {
    LatentPlan(nb::tuple fields, size_t rank);
    Latent view(const uint8_t* data) const;

    Run run;
    NormPlan norm;
    size_t rope, width;
    std::vector<float> bias;
};

// The latent vector of queries: (run, up run, norm, bias or None). Its units follow those of `LatentPlan`.
struct QueryLatentPlan {
    QueryLatentPlan(nb::tuple fields);
    QueryLatent view(const uint8_t* data) const;
    size_t bytes() const { return run.bytes() + up.bytes(); }

    Run run, up;
    NormPlan norm;
    std::vector<float> bias;
};

class AttentionPlan {
public:
    AttentionPlan(nb::tuple query, nb::tuple kv, nb::tuple norm, nb::tuple shape, nb::object kv_index, nb::tuple vectors,
                  nb::tuple numbers, nb::object latent, nb::object query_latent);
    void run(nb::handle data, nb::handle x, nb::handle keys, nb::handle values, nb::handle positions,
             nb::handle sequence, nb::handle tables, nb::handle out) const;
    // The steps of `run`; x is an array or a prepared input, as in `run`.
    void prepare(nb::handle x, bool normed, PreparedInput& into) const;
    void project(nb::handle data, nb::handle x, nb::handle positions, nb::tuple projected) const;
    void attend(nb::tuple projected, nb::handle keys, nb::handle values, nb::handle positions, nb::handle sequence,
                nb::handle tables, nb::handle out) const;
    void output(nb::handle data, nb::handle mixed, nb::handle out) const;

    // The parts of `run`, for callers that keep some of them (Chain): checked arrays, and the call.
    size_t hidden() const { return query_.hidden(); }
    bool empty() const { return !heads_; }
    std::unique_ptr<Array> weights(nb::handle data) const;
    std::unique_ptr<Array> cache(nb::handle array, const char* name) const;
    void check_batch(const BatchArrays& batch, const Array& keys, const Array& values) const;
    AttentionCall call(const Array& weights, const Array& keys, const Array& values, const BatchArrays& batch,
                       const float* x, float* out) const;

private:
    Kv view(const Array& cache) const;
    AttentionCall call(const uint8_t* data) const;
    void place(AttentionCall& call, const Array& keys, const Array& values, const BatchArrays& batch) const;
    ProjectedArrays heads_of(nb::tuple projected, size_t tokens, bool writable) const;
    void check_latent() const;
    bool gated() const { return query_.has("gate"); }
    const Run& q_run() const { return query_latent_ ? query_latent_->up : query_; }
    size_t latent_bytes() const {
        return (latent_ ? latent_->run.bytes() : 0) + (query_latent_ ? query_latent_->bytes() : 0);
    }
    size_t kv_width() const { return latent_ ? latent_->width : head_dim_; }

    Run query_, kv_;
    std::optional<LatentPlan> latent_;
    std::optional<QueryLatentPlan> query_latent_;
    NormPlan norm_;
    size_t heads_, kv_heads_, head_dim_;
    std::vector<int32_t> kv_index_;
    std::vector<float> q_bias_, k_bias_, v_bias_, q_norm_, k_norm_, inv_freq_, sinks_, v_norm_;
    float rope_scale_, scale_, softcap_;
    size_t window_;
    float clip_;
    bool whole_norms_;
    float growth_;
    int32_t growth_tokens_;
    bool late_norms_;
    bool shared_;
    RowForms forms_{};
};

// The sequences of a step with their states.
struct StepStates {
    std::vector<SequenceStates> sequences;
    std::vector<uint32_t> of_token;
};

// A block with a state for each sequence. Its vectors are those of run `values`, and of the run that a subclass adds.
class RecurrentPlan {
public:
    virtual ~RecurrentPlan() = default;
    // `squares` is None or [tokens]: set to the sums of squares of results that are normed after the sum over the nodes.
    void run(nb::handle data, nb::handle x, nb::handle states, nb::handle sequence, nb::handle slots, nb::handle out,
             nb::handle squares) const;
    void prepare(nb::handle x, bool normed, PreparedInput& into) const;

    // The parts of `run`, as in AttentionPlan. `compute` is the pool's only call; without `squares`, this node has all
    // that is normed together.
    size_t hidden() const { return values_.hidden(); }
    bool empty() const { return !values_.units(); }
    std::unique_ptr<Array> weights(nb::handle data) const;
    std::unique_ptr<Array> states(nb::handle array) const;
    // Check the rows `sequence` of the tokens, and `slots`: for each sequence the states to read (-1: none) and to
    // write, and the numbers of later tokens that are taken and stored (`SequenceStates`).
    StepStates place(const Array& states, nb::handle sequence, nb::handle slots, size_t tokens) const;
    virtual void compute(const Array& weights, const StepStates& states, size_t tokens, const float* x,
                         const Prepared* prepared, float* out, float* squares) const = 0;

protected:
    RecurrentPlan(nb::tuple values, nb::tuple norm, size_t taps);
    // Fill in what all calls have: the step.
    template <class Call>
    static void fill(Call& call, const StepStates& states, size_t tokens, const float* x, const Prepared* prepared,
                     float* out) {
        call.tokens = tokens;
        call.x = x;
        call.prepared = prepared;
        call.out = out;
        call.states = {states.sequences.data(), states.sequences.size(), states.of_token.data()};
    }
    virtual size_t bytes() const { return values_.bytes(); }
    virtual size_t state_values() const = 0;

    Run values_;
    NormPlan norm_;
    size_t taps_;
    RowForms forms_{};
};

class ConvPlan : public RecurrentPlan {
public:
    // shape: (channels, taps)
    ConvPlan(nb::tuple values, nb::tuple norm, nb::tuple shape, nb::object weights);
    void compute(const Array& weights, const StepStates& states, size_t tokens, const float* x,
                 const Prepared* prepared, float* out, float* squares) const override;

private:
    ConvCall call(const uint8_t* data) const;
    size_t state_values() const override { return call(nullptr).state_values(); }

    size_t channels_;
    std::vector<float> weights_;
};

class DeltaPlan : public RecurrentPlan {
public:
    // shape: (heads, key_heads, key, value, taps)
    // vectors: (a, b, decay, decay_bias, conv_q, conv_k, conv_v, out_norm)
    // A norm of the results has `normed` weights; 0: as many as a value head.
    DeltaPlan(nb::tuple values, nb::tuple keys, nb::tuple norm, nb::tuple shape, nb::object key_index, nb::tuple vectors,
              size_t normed = 0);
    void compute(const Array& weights, const StepStates& states, size_t tokens, const float* x,
                 const Prepared* prepared, float* out, float* squares) const override;

private:
    static constexpr size_t kVectors = 8, kFirstConvolution = 4;
    size_t bytes() const override { return values_.bytes() + keys_.bytes(); }
    size_t state_values() const override { return call(nullptr).state_values(); }

    Run keys_;
    std::vector<int32_t> key_index_;
    std::vector<float> vectors_[kVectors];

protected:
    DeltaCall call(const uint8_t* data) const;

    size_t heads_, key_heads_, key_, value_;
};

class MambaPlan : public DeltaPlan {
public:
    // As DeltaPlan. vectors: those of DeltaPlan, then (conv_bias, skip). numbers: (eps, least_step, most_step)
    MambaPlan(nb::tuple values, nb::tuple keys, nb::tuple norm, nb::tuple shape, nb::object key_index, nb::tuple vectors,
              nb::tuple numbers);
    void compute(const Array& weights, const StepStates& states, size_t tokens, const float* x,
                 const Prepared* prepared, float* out, float* squares) const override;

private:
    std::vector<float> conv_bias_, skip_;
    float eps_, least_step_, most_step_;
};

class FfnPlan {
public:
    FfnPlan(nb::tuple neuron, nb::tuple norm, const std::string& activation, bool gated, nb::object gate_bias,
            nb::object up_bias, float threshold, float slope);
    void run(nb::handle data, nb::handle x, nb::handle active, nb::handle out) const;
    void prepare(nb::handle x, bool normed, PreparedInput& into) const;

    // The parts of `run`, as in AttentionPlan; all neurons.
    size_t hidden() const { return neuron_.hidden(); }
    bool empty() const { return !neuron_.units(); }
    std::unique_ptr<Array> weights(nb::handle data) const;
    FfnCall call(const Array& weights, size_t tokens, const float* x, float* out) const;

    // A call for some of its units, whose weights begin at `data`; without input and output.
    FfnCall call(const uint8_t* data, size_t first, size_t units) const;
    const Run& run_layout() const { return neuron_; }
    const RowForms& forms() const { return forms_; }

private:
    Run neuron_;
    NormPlan norm_;
    Activation activation_;
    float threshold_, slope_;
    bool gated_;
    std::vector<float> gate_bias_, up_bias_;
    RowForms forms_{};
};

class RunPlan {
public:
    RunPlan(nb::tuple run) : run_(std::move(run)) {}
    // x times every row of the first part
    void rows(nb::handle data, nb::handle x, nb::handle out) const;
    // some rows of the first part
    void gather(nb::handle data, nb::handle rows, nb::handle out) const;
    // all vectors of one part
    void decode(nb::handle data, const std::string& part, nb::handle out) const;

private:
    Run run_;
};

// ---- for the sources of this module ----

template <class T> T field(const nb::tuple& fields, size_t index) { return nb::cast<T>(fields[index]); }

inline Py_ssize_t length(size_t value) { return static_cast<Py_ssize_t>(value); }

inline void zero(const Array& out) { std::memset(out.as<float>(), 0, out.total() * sizeof(float)); }

// Read an array of bytes with all threads.
void run_read(nb::handle data);
void run_norm(nb::handle x, nb::tuple norm, nb::handle out);

// The instruction set in use.
const Kernels& kernels();
void use_kernels(const std::string& name);

// Run one kernel as the pool's only call.
template <class Call> void run_alone(void (*kernel)(const Call&, Pool&), const Call& call) {
    Pool& pool = Pool::instance();
    std::lock_guard<std::mutex> turn(pool.turn());
    pool.arena().begin();
    kernel(call, pool);
}

// The same without the interpreter's lock.
template <class Call> void launch(void (*kernel)(const Call&, Pool&), const Call& call) {
    nb::gil_scoped_release unlocked;
    run_alone(kernel, call);
}

}  // namespace tpi

// One pool of threads per process. A job is one function that every thread of the team runs; inside it the team shares
// work with `each` and syncs with `sync`. Waiting threads spin briefly, then sleep, and spin less if that did not help.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tpi {

// Memory of one call, reused by the next. It grows; pointers are valid until the call ends.
class Arena {
public:
    ~Arena();
    void begin() { used_ = 0; }
    // Memory that was taken after reading `used` is free again after a `rewind` to that value.
    size_t used() const { return used_; }
    void rewind(size_t used) { used_ = used; }
    // Take `count` values, aligned to 64 bytes, uninitialised, with 64 readable bytes after them.
    template <class T> T* take(size_t count) { return static_cast<T*>(take_bytes(count * sizeof(T))); }

private:
    void* take_bytes(size_t bytes);
    struct Slab { void* data; size_t bytes; };
    std::vector<Slab> slabs_;
    size_t used_ = 0;  // slabs in use by this call
};

// A place where threads wait for a counter to change.
class Signal {
public:
    uint32_t read() const { return value_.load(std::memory_order_acquire); }
    void advance();
    void wait_while(uint32_t seen);

private:
    alignas(64) std::atomic<uint32_t> value_{0};
    std::atomic<uint32_t> sleepers_{0};
    std::atomic<int64_t> patience_{50'000};  // nanoseconds
};

// Decides if a job is worth sharing. If other processes use the same cores, the team waits for threads that the system
// has suspended. Once waiting has cost more than the help was worth, jobs run on the caller alone for a while.
class Teamwork {
public:
    using Time = std::chrono::steady_clock::time_point;
    bool shares(Time now) const { return now >= alone_until_; }
    // Record a shared job as its caller saw it: its seconds, and the seconds of waiting among them.
    void record(Time now, double seconds, double waited, size_t threads);

private:
    static constexpr std::chrono::microseconds kLeastAlone{2'000}, kMostAlone{500'000};
    // seconds of shared jobs before a decision: many times the time that waking the threads takes
    static constexpr double kTrial = 1e-3;
    double seconds_ = 0, waited_ = 0;  // since the last decision
    Time alone_until_{};
    std::chrono::microseconds pause_ = kLeastAlone;
};

class Pool;

// One thread's handle on the job that it runs.
class Team {
public:
    Team(Pool& pool, size_t index) : pool_(pool), index_(index) {}
    size_t index() const { return index_; }
    size_t size() const;
    // Wait for the whole team.
    void sync();
    // The next free item of the current phase; every call of `each` is a phase of its own.
    size_t claim(size_t phase);
    // Run `work(i)` for i < count on all threads, as they become free. Does not wait for the others.
    template <class Work> void each(size_t count, const Work& work) {
        size_t phase = phase_++;
        for (size_t i = claim(phase); i < count; i = claim(phase)) work(i);
    }

private:
    Pool& pool_;
    size_t index_;
    size_t phase_ = 0;
};

class Pool {
public:
    using Job = void (*)(const void* context, Team& team);
    static Pool& instance();
    ~Pool();
    // Threads that take part, the caller included. Throws std::system_error if the system cannot start that many; then
    // only the caller is left.
    void resize(size_t threads);
    size_t size() const { return size_; }
    // Run `job` on every thread and wait for all; on the caller alone if waking the others is not worthwhile.
    void run_job(Job job, const void* context, bool worth_sharing);
    std::mutex& turn() { return turn_; }
    Arena& arena() { return arena_; }

private:
    friend class Team;
    static constexpr size_t kPhases = 16;
    struct alignas(64) Counter { std::atomic<size_t> next{0}; };

    void work(size_t index, uint32_t seen);
    void stop();

    std::mutex turn_;
    Arena arena_;
    std::vector<std::thread> threads_;
    size_t size_ = 1;
    size_t crew_ = 1;     // threads that take part in this job
    double waited_ = 0;   // seconds that the caller waited in this job
    Teamwork teamwork_;
    bool stopping_ = false;
    Job job_ = nullptr;
    const void* context_ = nullptr;
    Counter counters_[kPhases];
    Signal start_, met_;
    alignas(64) std::atomic<size_t> arrived_{0};
};

// Run `job(context, team)` as Pool::run_job does. It has internal linkage: otherwise the linker would keep one copy,
// compiled for one instruction set, and use it for all.
namespace {

template <class Context>
inline void run_on(Pool& pool, void (*job)(const Context&, Team&), const Context& context, bool worth_sharing = true) {
    struct Typed { void (*job)(const Context&, Team&); const Context* context; };
    Typed typed{job, &context};
    pool.run_job([](const void* any, Team& team) {
        auto* call = static_cast<const Typed*>(any);
        call->job(*call->context, team);
    }, &typed, worth_sharing);
}

}  // namespace

}  // namespace tpi

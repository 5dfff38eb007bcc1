#include "pool.hpp"

#include <cstdlib>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace tpi {

namespace {

constexpr uint32_t kMostPatience = 8192;  // pauses: a few hundred microseconds at most
constexpr uint32_t kLeastPatience = 64;

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

Pool* current = nullptr;

}  // namespace

Arena::~Arena() {
    for (Slab& slab : slabs_) std::free(slab.data);
}

void* Arena::take_bytes(size_t bytes) {
    if (used_ == slabs_.size()) slabs_.push_back({nullptr, 0});
    Slab& slab = slabs_[used_++];
    if (slab.bytes < bytes) {
        std::free(slab.data);
        size_t whole = (bytes + bytes / 4 + 127) / 64 * 64;
        slab.data = std::aligned_alloc(64, whole);
        slab.bytes = slab.data ? whole - 64 : 0;
        if (!slab.data) throw std::bad_alloc();
    }
    return slab.data;
}

void Signal::advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) value_.notify_all();
}

void Signal::wait_while(uint32_t seen) {
    uint32_t patience = patience_.load(std::memory_order_relaxed);
    for (uint32_t spins = 0; spins < patience; ++spins) {
        if (read() != seen) {
            if (patience < kMostPatience) patience_.store(patience + patience / 8 + 1, std::memory_order_relaxed);
            return;
        }
        pause();
    }
    patience_.store(patience / 2 > kLeastPatience ? patience / 2 : kLeastPatience, std::memory_order_relaxed);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (read() == seen) value_.wait(seen, std::memory_order_acquire);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

size_t Team::size() const { return pool_.size_; }

size_t Team::claim(size_t phase) {
    return pool_.counters_[phase % Pool::kPhases].next.fetch_add(1, std::memory_order_relaxed);
}

void Team::sync() {
    if (pool_.size_ == 1) return;
    uint32_t seen = pool_.met_.read();
    if (pool_.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == pool_.size_) {
        pool_.arrived_.store(0, std::memory_order_relaxed);
        pool_.met_.advance();
    } else {
        pool_.met_.wait_while(seen);
    }
}

Pool& Pool::instance() {
    static std::once_flag once;
    std::call_once(once, [] {
        current = new Pool();  // never destroyed: threads of an exiting process just end
#if defined(__unix__) || defined(__APPLE__)
        // a forked child has none of its parent's threads and starts anew
        pthread_atfork(nullptr, nullptr, [] { current = new Pool(); });
#endif
    });
    return *current;
}

Pool::~Pool() { stop(); }

void Pool::resize(size_t threads) {
    std::lock_guard<std::mutex> lock(turn_);
    if (threads == size_) return;
    stop();
    size_ = threads;
    stopping_ = false;
    uint32_t seen = start_.read();
    for (size_t index = 1; index < threads; ++index) threads_.emplace_back(&Pool::work, this, index, seen);
}

void Pool::stop() {
    stopping_ = true;
    start_.advance();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

void Pool::run_job(Job job, const void* context) {
    for (Counter& counter : counters_) counter.next.store(0, std::memory_order_relaxed);
    job_ = job;
    context_ = context;
    if (size_ > 1) start_.advance();
    Team team(*this, 0);
    job(context, team);
    team.sync();
}

void Pool::work(size_t index, uint32_t seen) {
    for (;; ++seen) {
        start_.wait_while(seen);
        if (stopping_) return;
        Team team(*this, index);
        job_(context_, team);
        team.sync();
    }
}

}  // namespace tpi

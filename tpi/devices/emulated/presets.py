"""The machines of the papers, as text for `tpi.devices.emulated.machine`.

Each comment quotes what the paper says of its machine; other figures are from data sheets. A card's FLOPS are those of
its tensor cores, float16 products summed in float32, without sparsity. Links and disks have the speed that is reached
in practice: 0.8 of PCIe's rate after its encoding.
"""

PRESETS = {
    # PIPO, section 4.1: Lenovo ThinkBook, RTX 3060 (6 GB), 16 GB of memory, 1 TB M.2 SSD. Data sheets: GDDR6, 192 bits,
    # 14 Gb/s: 336 GB/s; 22.8 TFLOPS at 85 W; PCIe 4.0 x8 (15.75 GB/s); host: DDR4-3200, two channels (51.2 GB/s, of
    # which 0.8), 8 cores with AVX2 at 3.2 GHz (32 FLOP per cycle: 0.8 T, of which 0.75); SSD: PCIe 3.0 x4 (3.9 GB/s).
    "rtx3060-laptop": "6GiB,link=12GB/s,memory=336GB/s,flops=22.8TFLOPS,host_memory=40GB/s,host_flops=0.6TFLOPS,"
    "disk=3GB/s,ram=16GiB",
    # PIPO, appendix C.5: RTX 4090, 64 GB of memory; appendix C.4 speaks of a link of 20 GB/s. Data sheets: 24 GB
    # GDDR6X, 384 bits, 21 Gb/s: 1008 GB/s; 165.2 TFLOPS; host: DDR5-5600, two channels (89.6 GB/s, of which 0.75),
    # 8 cores with AVX2 at 5 GHz (1.3 T, of which 0.75); SSD: PCIe 4.0 x4 (7.9 GB/s).
    "rtx4090-desktop": "24GiB,link=20GB/s,memory=1008GB/s,flops=165TFLOPS,host_memory=67GB/s,host_flops=1TFLOPS,"
    "disk=6GB/s,ram=64GiB",
    # PowerInfer, section 8.1: i9-13900K (8 performance cores at 5.4 GHz: 1.4 T, of which 0.75), 192 GB at 67.2 GB/s,
    # RTX 4090 (24 GB, 1 TB/s), PCIe 4.0 x16: "64 GB/s" is both ways, one is 31.5 GB/s. Data sheet: 165.2 TFLOPS.
    "pc-high": "24GiB,link=25GB/s,memory=1TB/s,flops=165TFLOPS,host_memory=67.2GB/s,host_flops=1TFLOPS,disk=6GB/s,"
    "ram=192GiB",
    # PowerInfer, section 8.1: i7-12700K (8 performance cores at 4.9 GHz: 1.25 T, of which 0.75), 64 GB at 38.4 GB/s,
    # RTX 2080 Ti (11 GB, 616 GB/s), PCIe 3.0 x16: "32 GB/s" is both ways, one is 15.75 GB/s. Data sheet: 53.8 TFLOPS.
    "pc-low": "11GiB,link=12.6GB/s,memory=616GB/s,flops=53.8TFLOPS,host_memory=38.4GB/s,host_flops=0.9TFLOPS,"
    "disk=3GB/s,ram=64GiB",
    # MoE-Lightning, table 2, setting S1: T4 (16 GB), Xeon at 2.3 GHz with 24 virtual cores, 192 GB. Data sheets: 320
    # GB/s, 65 TFLOPS, PCIe 3.0 x16 (15.75 GB/s). Host: section 6.3 sets 100 GB/s and 1.6 TFLOPS. Disk: a cloud's.
    "t4": "16GiB,link=12.6GB/s,memory=320GB/s,flops=65TFLOPS,host_memory=100GB/s,host_flops=1.6TFLOPS,disk=1.2GB/s,"
    "ram=192GiB",
    # MoE-Lightning, table 2, setting S2: L4 (24 GB), Xeon at 2.2 GHz with 24 virtual cores, 192 GB. Data sheets: 300
    # GB/s, 121 TFLOPS, PCIe 4.0 x16 (31.5 GB/s). Host and disk as above.
    "l4": "24GiB,link=25GB/s,memory=300GB/s,flops=121TFLOPS,host_memory=100GB/s,host_flops=1.6TFLOPS,disk=1.2GB/s,"
    "ram=192GiB",
}
